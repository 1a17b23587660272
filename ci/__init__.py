"""What maintainers and workflows run: scripts that start no MPI and import nothing of sp_core."""
