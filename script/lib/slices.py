"""slices.py COUNT <STATUS: exits 0 if all slices are served, and could be taken over.

STATUS is what `dray status --json` prints. Each server there has to say so of COUNT slices."""

import json
import sys

count = int(sys.argv[1])
processes = [json.loads(line) for line in sys.stdin if line.strip()]
exports = [export for one in processes if one["kind"] == "server" for export in one["exports"]]
views = [export["failover"]["slices"] for export in exports if export.get("failover")]
served = sum(slice["answered_here"] for view in views for slice in view)
ready = all(
    len(view) == count and all(s["in_step"] and not s["slice_recovering"] for s in view)
    for view in views
)
sys.exit(not (ready and served == count))
