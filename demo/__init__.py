"""`make demo`: a real broker, a real Postgres, the real processor, and SIGKILLs at the worst moments.

`story.py` plays the scenes. `verify.py` judges the result: it reads both systems by itself and shares no
code with the processor.
"""
