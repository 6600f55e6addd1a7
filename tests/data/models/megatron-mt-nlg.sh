#!/bin/bash
# Megatron-Turing NLG 530B (https://arxiv.org/abs/2201.11990)
GPT_ARGS="
    --num-layers 105 \
    --hidden-size 20480 \
    --num-attention-heads 128 \
    --seq-length 2048 \
    --tensor-model-parallel-size 8 \
    --pipeline-model-parallel-size 35 \
    --micro-batch-size 1 \
    --global-batch-size 1920
"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS --vocab-size 51200
