# SPDX-License-Identifier: Apache-2.0
"""What every slot holds, worked out from the commands and the forward passes alone."""
