"""Operations: functions from checkpoint to checkpoint. They know nothing of files, shards,
processes or the screen.
"""
