"""Our collectives against the MPI library's and gloo's, and the loss of "auto" against the best: `nox -s collectives`."""
