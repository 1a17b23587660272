"""This project's attention schemes against others' and against one process, as ratios in one run."""
