"""Our collectives against the MPI library's and gloo's, and what "auto" loses."""
