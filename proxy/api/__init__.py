"""HTTP endpoints: they read bodies, check access, call the other packages and write replies.

The end of a reply is sent only after its turn is committed. Errors go out in the envelope of the API that was called.
"""
