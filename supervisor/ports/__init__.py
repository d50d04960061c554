"""The sockets: those that clients and workers connect to, who may, and what is still there of them."""
