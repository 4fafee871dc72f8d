"""HTTP endpoints: they read bodies, check access, call the other packages and write replies.

The end of a reply is sent only after its turn is committed. Errors are sent in the envelope of the called API.
"""
