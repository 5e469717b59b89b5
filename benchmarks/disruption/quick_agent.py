"""`drover-agent` as shipped, but that it looks for a renewed certificate each second, not each minute."""

import sys

from disruption.agents import ACK_LIMIT_S, LONGEST_PAUSE_S, RENEWAL_CHECK_S
from drover_agent.main import main
from drover_agent.uplink import stream as uplink

uplink.ACK_LIMIT_S, uplink.RENEWAL_CHECK_S, uplink.LONGEST_PAUSE_S = ACK_LIMIT_S, RENEWAL_CHECK_S, LONGEST_PAUSE_S
sys.exit(main(sys.argv[1:]))
