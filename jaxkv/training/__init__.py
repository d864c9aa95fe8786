# SPDX-License-Identifier: Apache-2.0
"""Training: data, loss, steps, the loop, checkpoints, and where things lie on a mesh."""

from jaxkv.training.batch import Batch as Batch
from jaxkv.training.checkpoint import Checkpoints as Checkpoints
from jaxkv.training.checkpoint import restore_model as restore_model
from jaxkv.training.config import TrainConfig as TrainConfig
from jaxkv.training.data import Data as Data
from jaxkv.training.data import TextData as TextData
from jaxkv.training.loop import TrainResult as TrainResult
from jaxkv.training.loop import train as train
from jaxkv.training.loss import cross_entropy as cross_entropy
from jaxkv.training.loss import next_token_loss as next_token_loss
from jaxkv.training.packing import PackedData as PackedData
from jaxkv.training.placement import init_sharded as init_sharded
from jaxkv.training.placement import parameter_shardings as parameter_shardings
from jaxkv.training.placement import shardings as shardings
from jaxkv.training.state import Program as Program
from jaxkv.training.state import TrainState as TrainState
from jaxkv.training.state import parameters as parameters
from jaxkv.training.step import eval_step as eval_step
from jaxkv.training.step import train_step as train_step
from jaxkv.training.text import ByteTokenizer as ByteTokenizer
from jaxkv.training.text import read_text as read_text
