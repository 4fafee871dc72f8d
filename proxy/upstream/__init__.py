"""External models: answers a parsed request from the API of another server, streamed.

It knows nothing of sessions, trees and engines. `client` is what others use; `hosts` checks URLs that were not declared
in the configuration.
"""
