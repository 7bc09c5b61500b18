"""HTTP/1.1 for frames: requests and answers whose bodies have a declared length, over connections that stay open.

`messages` are heads as text, `connection` is one end of a connection, `client` calls other nodes, and `server` takes
frames in and leaves all that is not one to aiohttp. Why: docs/adr/0017-http-for-frames.md.
"""
