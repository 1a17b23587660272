"""What tests compare with: the float64 reference, drawn problems and a device without hardware."""
