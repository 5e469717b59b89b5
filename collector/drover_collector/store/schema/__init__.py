"""Tables, codecs and migrations."""
