"""The server of Tokengrove: it serves agents' model calls and records their exact tokens as trees for RL trainers.

The command `tokengrove serve` runs it; what users import is `tokengrove`. `ARCHITECTURE.md` beside this file says which
package does what. Packages import from the layers below them only.
"""

from proxy.moved import MovedModules

SERVER = "tokengrove"
"""Tells this package from others of the same name (`tokengrove.server_part`)."""

MovedModules().install()
