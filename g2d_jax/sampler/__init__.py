"""Sample responses: a schedule of rows, three jitted programs over the whole mesh, and what drives them."""
