"""What takes nodes out of service and puts them back: actuators (a file each) and the desk that works decisions off."""
