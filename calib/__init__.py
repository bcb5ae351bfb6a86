"""Forward passes over calibration text, one decoder layer at a time, and the statistics that they leave."""
