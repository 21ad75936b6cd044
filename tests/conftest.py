# SPDX-License-Identifier: MIT
"""For all tests.

"CASES n" in a test names the kind of fault that it keeps out. Each was seen in a public decoder:

 1  a padding mask that is ignored             17  EOS forbidden where it should come later
 2  only single rows can be decoded            18  a cache believed exact beyond one layer
 3  guidance without the padding mask          19  shifted logits, off by one at a window's edge
 4  NaN of rows that see nothing               20  keys rotated twice
 5  sampling looks at the first row only       21  a cache that keeps the mask's keys and values
 6  a finished row breaks the batch            22  savings claimed, but no less work done
 7  a threshold that nothing passes: no end    23  accept-all fails in its second round
 8  the factor rule off by one                 24  the prompt is re-masked
 9  M or padded vocabulary rows in a text      25  a token vouches for itself
10  two rules given, one ignored               26  only masks are scored: nothing is ever revoked
11  a forward spent on a full block            27  options that change nothing
12  gen_length and block_length do not divide  28  a likelihood that depends on its sample count
13  a schedule with a first step of none       29  confidence with or without the temperature
14  infilling refused                          30  float64 of the whole canvas and vocabulary
15  forwards miscounted; Gumbel overflow       31  checkpoints that need their own code
16  text after its end                         32  a mask id that no file names; prompt counted as
                                                   generated
"""
import signal

import pytest


@pytest.fixture(autouse=True)
def ctrl_c_works():
    """A shell's background job ignores SIGINT, and so would what the tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
