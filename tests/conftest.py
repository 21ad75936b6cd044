# SPDX-License-Identifier: MIT
"""For all tests.

"CASES n" in a test names the kind of fault that it keeps out. Each was seen in a public
decoder, or in an earlier version of this module:

 1  a padding mask that is ignored
 2  only single rows can be decoded
 3  guidance without the padding mask
 4  NaN of rows that see nothing
 5  sampling looks at the first row only
 6  a finished row breaks the batch
 7  a threshold that nothing passes: no end
 8  the factor rule off by one
 9  M or padded vocabulary rows in a text
10  two rules given, one ignored
11  a forward spent on a full block
12  gen_length and block_length do not divide
13  a schedule with a first step of none
14  infilling refused
15  forwards miscounted; Gumbel overflow
16  text after its end
17  EOS forbidden where it should come later
18  a cache believed exact beyond one layer
19  shifted logits, off by one at a window's edge
20  keys rotated twice
21  a cache that keeps the mask's keys and values
22  savings claimed, but no less work done
23  accept-all fails in its second round
24  the prompt is re-masked
25  a token vouches for itself
26  only masks are scored: nothing is ever revoked
27  options that change nothing
28  a likelihood that depends on its sample count
29  confidence with or without the temperature
30  float64 of the whole canvas and vocabulary
31  checkpoints that need their own code
32  a mask id that no file names; a prompt counted as generated
33  what is judged is not banned as what is drafted is
34  a window changes logits of a canvas that has not changed; models with recurrent layers
35  a model that does not take its attention from the interface stays causal in silence
36  the loss of a shifted model reads the wrong position
37  a two-dimensional padding mask given to the model itself is misread
38  a logits processor sees the padding
39  two threads on one denoiser disturb each other
40  a device that is not there is accepted
41  padded ids without their mask; canvases longer than the model was trained on
42  the factor rule commits one rank too many when the last one fails
43  an unsupported architecture fails with an unrelated error
44  a sampler's defaults do not solve the example
45  a knob of another sampler is refused only after the model was loaded
"""
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")   # before torch: the tests run in two processes
import pytest


@pytest.fixture(autouse=True)
def ctrl_c_works():
    """A shell's background job ignores SIGINT, and so would what the tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
