"""The flight recorder: digests of actions, alarms, bundles of a step, and their replay."""
