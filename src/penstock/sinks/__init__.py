"""Where changes go. A sink commits a table's data and its position in one atomic act."""
