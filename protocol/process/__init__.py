"""Code that the processes of modelctl on one machine share besides messages.

It covers the start and the progress of a worker, the places of sockets and private files, core dumps, and compiled
modules. Modules here may import the contract (the modules of ``protocol`` itself), but not the client.
"""
