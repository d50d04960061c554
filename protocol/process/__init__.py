"""What the processes of modelctl on one machine share besides messages.

How a worker is started and shows progress, where sockets and private files are, what a process forbids itself, and how
compiled modules are found. Modules here may import the contract (the modules of ``protocol`` itself), not the client.
"""
