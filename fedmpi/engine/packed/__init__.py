"""Several clients of a rank trained at once (`compute.pack`): one batched operation where one by one takes n."""
