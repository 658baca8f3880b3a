"""Which layout, and what it costs: descriptions, memory and time models, search. numpy only, until a module is traced."""
