"""This project's attention schemes against others' and against one process."""
