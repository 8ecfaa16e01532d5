# SPDX-License-Identifier: Apache-2.0
"""Files and URLs: reading with any compression, atomic writing, locks and checks.

`places` has the type of a path or URL, `files` reads, `writing` writes, `urls` copies remote files, and `schema`
checks JSON. `stores` talks to object stores, and `leases` are their locks.
"""
