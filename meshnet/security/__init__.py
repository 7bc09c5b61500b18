"""The shared secret of a mesh, and who has to show it.

`tokens` and `token_file` are the secret as text, `shared_secret` follows its file while a process runs, `grpc_guard`
asks for it, `grpc_signing` and `bearer` show it, and `startup` refuses what would leave a mesh open. Why one secret:
docs/adr/0022-one-secret.md.
"""
