"""The second tier: real servers, threads and sockets. A seed chooses what happens and when, but not the order of
events, so a failure need not come again.

`python -m tests.torture.processes --seed N --minutes M [--scenario S]`
"""
