"""Which layout, and what it costs: descriptions, memory and time models, search. numpy only, but to trace and probe."""
