"""The Fleet API: what the console and the command line ask. A file for each subject."""
