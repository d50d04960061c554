"""Workers on other machines: their agents, and the launcher that starts and watches them."""
