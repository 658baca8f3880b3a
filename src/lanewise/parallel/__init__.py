"""How one replica spreads over ranks: one file for each axis, `build` applies them in order."""
