"""`make demo`: a real broker, a real Postgres, the real processor, and SIGKILLs at the worst moments.

`story.py` orders the scenes, `verify.py` judges: it reads both systems on its own and shares no code
with the processor.
"""
