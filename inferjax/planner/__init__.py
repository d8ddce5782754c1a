"""Plans: what fits on which chips, how fast it can be at best, and what that costs.

Arithmetic only: no array is made, and nothing is loaded, compiled or measured.
"""

from inferjax.planner.hardware import CHIPS as CHIPS
from inferjax.planner.hardware import Chip as Chip
from inferjax.planner.hardware import chip_named as chip_named
from inferjax.planner.hardware import measured_chip as measured_chip
from inferjax.planner.load import Load as Load
from inferjax.planner.mesh import Mesh as Mesh
from inferjax.planner.model import Model as Model
from inferjax.planner.model import make_model as make_model
from inferjax.planner.plan import Drafts as Drafts
from inferjax.planner.plan import Plan as Plan
from inferjax.planner.plan import make_plan as make_plan
from inferjax.planner.public_models import public_config as public_config
from inferjax.planner.search import Point as Point
from inferjax.planner.search import fewest_chips as fewest_chips
