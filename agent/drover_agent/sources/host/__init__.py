"""The node itself: load, memory, disks, sensors, inventory."""
