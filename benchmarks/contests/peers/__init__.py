"""Time our attention schemes against those of other libraries and against one process."""
