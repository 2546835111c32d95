"""Types whose codes stand for values of a table (IQ4) or points of a codebook (IQ1 to IQ3). Read `iq4_nl` first."""
