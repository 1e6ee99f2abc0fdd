"""A training of Keras 2 on two replicas, beside Keras 3."""

import numpy as np
import tensorflow as tf

import tfscale

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tfscale.ScaleStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.zeros((8, 4)), np.zeros((8, 1)), batch_size=4, verbose=0)
