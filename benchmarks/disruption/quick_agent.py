"""`drover-agent` as shipped, but that it looks for a renewed certificate each second, not each minute."""

import sys

from disruption.agents import ACK_LIMIT_S, LONGEST_PAUSE_S, RENEWED_LOOK_S
from drover_agent.main import main
from drover_agent.uplink import stream as uplink

uplink.ACK_LIMIT_S, uplink.RENEWED_LOOK_S, uplink.LONGEST_PAUSE_S = ACK_LIMIT_S, RENEWED_LOOK_S, LONGEST_PAUSE_S
sys.exit(main(sys.argv[1:]))
