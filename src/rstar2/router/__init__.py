"""`rstar2 route`: the scheduler of rollouts as an HTTP router in front of vLLM servers.

    client ──POST──> app ──> Router ──submit──> Scheduler (rollout/scheduler.py)
                               │  <─placement──
                               └──> Backend: one vLLM server ──answer, part by part──> client

`turns.py` reads what the scheduler needs to know from requests and answers, `backend.py` is one
server, `router.py` carries out the scheduler's decisions, `app.py` is the HTTP interface.
"""
