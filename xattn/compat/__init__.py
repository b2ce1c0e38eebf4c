"""Drop-ins for what other libraries call: each module keeps the other library's arguments and their meaning."""
