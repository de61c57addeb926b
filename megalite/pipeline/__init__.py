"""Pipeline parallelism: schedules as data, proved by simulation, lowered to messages, run by one executor."""
