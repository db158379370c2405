"""`dapo view`: a local page over a data root. It reads, and writes nothing there."""
