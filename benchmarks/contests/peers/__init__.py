"""Time our attention schemes against others' and against one process."""
