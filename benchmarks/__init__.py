"""How fast it is, measured from outside: facts in Kafka and Postgres, never a subject's own words.

A subject is a long-running process that reads the input topic, does the same work as all others and writes
the output topic. They take turns on the same servers, so that a slow moment of the machine hits all of them alike.
"""
