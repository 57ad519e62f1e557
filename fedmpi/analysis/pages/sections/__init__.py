"""What a report tells, a file for each family: functions (Runs) -> Section, or None where no run has such a record."""
