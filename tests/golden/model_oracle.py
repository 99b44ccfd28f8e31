"""Float64 oracle of a whole decoder language model, forward and backward, in plain NumPy; make_model_golden.py writes
files with it.

Embedding, layers (attention block of mla_oracle.py, then SwiGLU or a mixture of experts), norm, head, mean cross-entropy
over scored tokens. T tokens of packed documents in one row: a token sees tokens of its own document up to itself.
"""

import numpy as np

import mla_oracle as oracle

# ------------------------------------------------------------------------------------------------------------- MLP


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def mlp_forward(weights, name, x):
    """(SwiGLU of x [T, D], tape)."""
    gate, up = oracle.linear(x, weights, name + ".gate_proj"), oracle.linear(x, weights, name + ".up_proj")
    hidden = gate * sigmoid(gate) * up
    return oracle.linear(hidden, weights, name + ".down_proj"), (x, gate, up, hidden)


def mlp_backward(weights, name, tape, dy, grads):
    x, gate, up, hidden = tape
    dhidden = oracle.linear_backward(dy, hidden, weights, name + ".down_proj", grads)
    s = sigmoid(gate)
    dgate = dhidden * up * (s + gate * s * (1 - s))
    dx = oracle.linear_backward(dgate, x, weights, name + ".gate_proj", grads)
    return dx + oracle.linear_backward(dhidden * gate * s, x, weights, name + ".up_proj", grads)


# ------------------------------------------------------------------------------------- mixture of experts, V3's router


def choose_experts(config, weights, name, x):
    """Experts [T, top_k], best first, and the smallest gap by which any choice was made."""
    scores = sigmoid(x @ weights[name + ".gate.weight"].T) + weights[name + ".gate.e_score_correction_bias"]
    groups, kept, k = config["n_group"], config["topk_group"], config["num_experts_per_tok"]
    experts, gap = [], np.inf
    for row in scores:
        by_group = row.reshape(groups, -1)
        group_scores = np.sort(by_group, axis=1)[:, -2:].sum(axis=1)
        order = np.argsort(-group_scores)
        masked = np.full_like(by_group, -np.inf)
        masked[order[:kept]] = by_group[order[:kept]]
        if kept < groups:
            gap = min(gap, group_scores[order[kept - 1]] - group_scores[order[kept]])
        best = np.argsort(-masked.reshape(-1))[: k + 1]
        gap = min(gap, *(row[best[j]] - row[best[j + 1]] for j in range(k) if np.isfinite(masked.reshape(-1)[best[j + 1]])))
        experts.append(best[:k])
    return np.array(experts), gap


def moe_forward(config, weights, name, x, experts):
    """(output [T, D], tape) with `experts` [T, top_k] given."""
    scores = sigmoid(x @ weights[name + ".gate.weight"].T)
    chosen = np.take_along_axis(scores, experts, axis=1)
    total = chosen.sum(axis=1, keepdims=True) + 1e-20
    mix = config["routed_scaling_factor"] * (chosen / total if config["norm_topk_prob"] else chosen)
    y, shared = mlp_forward(weights, name + ".shared_experts", x)
    tape = {"x": x, "scores": scores, "total": total, "mix": mix, "shared": shared, "experts": {}}
    for e in range(config["n_routed_experts"]):
        rows, slots = np.nonzero(experts == e)
        out, expert_tape = mlp_forward(weights, f"{name}.experts.{e}", x[rows])
        y[rows] += mix[rows, slots][:, None] * out
        tape["experts"][e] = (rows, slots, out, expert_tape)
    return y, tape


def moe_backward(config, weights, name, tape, experts, dy, grads):
    dx = mlp_backward(weights, name + ".shared_experts", tape["shared"], dy, grads)
    dmix = np.zeros_like(tape["mix"])
    for e, (rows, slots, out, expert_tape) in tape["experts"].items():
        dmix[rows, slots] = (dy[rows] * out).sum(axis=1)
        dout = tape["mix"][rows, slots][:, None] * dy[rows]
        np.add.at(dx, rows, mlp_backward(weights, f"{name}.experts.{e}", expert_tape, dout, grads))
    dchosen = config["routed_scaling_factor"] * dmix
    if config["norm_topk_prob"]:
        share = np.take_along_axis(tape["scores"], experts, axis=1) / tape["total"]
        dchosen = (dchosen - (dchosen * share).sum(axis=1, keepdims=True)) / tape["total"]
    dscores = np.zeros_like(tape["scores"])
    np.put_along_axis(dscores, experts, dchosen, axis=1)
    dlogits = dscores * tape["scores"] * (1 - tape["scores"])
    grads[name + ".gate.weight"] = dlogits.T @ tape["x"]
    return dx + dlogits @ weights[name + ".gate.weight"]


# ----------------------------------------------------------------------------------------------------------- the model


def is_moe(config, layer):
    return bool(config.get("n_routed_experts")) and layer >= config["first_k_dense_replace"]


def below(weights, prefix):
    """The weights whose names begin with `prefix`, without it."""
    return {name[len(prefix):]: value for name, value in weights.items() if name.startswith(prefix)}


def head_name(config):
    return "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"


def model_forward(config, weights, data, experts):
    """(mean loss, losses [T], tape). `data` has tokens, targets (−1: not scored), segments and positions, [T] each;
    experts[layer] [T, top_k] is chosen here where it is None, and entered."""
    attend = oracle.mla_forward if "kv_lora_rank" in config else oracle.gqa_forward
    same = data["segments"][:, None] == data["segments"][None, :]
    mask = same & (data["positions"][None, :] <= data["positions"][:, None])
    x = weights["model.embed_tokens.weight"][data["tokens"]]
    tape = {"layers": [], "gap": np.inf}
    for layer in range(config["num_hidden_layers"]):
        w = below(weights, f"model.layers.{layer}.")
        middle, attention = attend(config, w, x[:, None, :], 0, data["positions"], mask)
        middle = middle[:, 0]
        u = oracle.rms_norm(middle, w["post_attention_layernorm.weight"], config["rms_norm_eps"])
        if is_moe(config, layer):
            if experts[layer] is None:
                experts[layer], gap = choose_experts(config, w, "mlp", u)
                tape["gap"] = min(tape["gap"], gap)
            out, ffn = moe_forward(config, w, "mlp", u, experts[layer])
        else:
            out, ffn = mlp_forward(w, "mlp", u)
        x = middle + out
        tape["layers"].append({"attention": attention, "middle": middle, "ffn": ffn, "output": x})
    tape["normed"] = oracle.rms_norm(x, weights["model.norm.weight"], config["rms_norm_eps"])
    logits = tape["normed"] @ weights[head_name(config)].T
    largest = logits.max(axis=1, keepdims=True)
    e = np.exp(logits - largest)
    tape["p"] = e / e.sum(axis=1, keepdims=True)
    lse = (largest + np.log(e.sum(axis=1, keepdims=True)))[:, 0]
    scored = data["targets"] >= 0
    losses = np.where(scored, lse - logits[np.arange(len(lse)), data["targets"]], 0.0)
    return losses.sum() / scored.sum(), losses, tape


def model_backward(config, weights, data, experts, tape):
    """Gradients of the mean loss by weight name."""
    attend_backward = oracle.mla_backward if "kv_lora_rank" in config else oracle.gqa_backward
    scored = data["targets"] >= 0
    dlogits = tape["p"].copy()
    dlogits[np.arange(len(scored)), data["targets"]] -= 1
    dlogits *= scored[:, None] / scored.sum()
    grads = {head_name(config): dlogits.T @ tape["normed"]}
    name = "model.norm.weight"
    dx, grads[name] = oracle.rms_norm_backward(dlogits @ weights[head_name(config)], tape["layers"][-1]["output"],
                                               weights[name], config["rms_norm_eps"])
    for layer in reversed(range(config["num_hidden_layers"])):
        w, t, g = below(weights, f"model.layers.{layer}."), tape["layers"][layer], {}
        if is_moe(config, layer):
            du = moe_backward(config, w, "mlp", t["ffn"], experts[layer], dx, g)
        else:
            du = mlp_backward(w, "mlp", t["ffn"], dx, g)
        name = "post_attention_layernorm.weight"
        dmiddle, g[name] = oracle.rms_norm_backward(du, t["middle"], w[name], config["rms_norm_eps"])
        dx, attention = attend_backward(config, w, t["attention"], (dx + dmiddle)[:, None, :])
        dx = dx[:, 0]
        grads.update({f"model.layers.{layer}.{name}": value for name, value in {**g, **attention}.items()})
    name = "model.embed_tokens.weight"
    grads.setdefault(name, np.zeros_like(weights[name]))
    np.add.at(grads[name], data["tokens"], dx)
    return grads


def model_shapes(config, biases):
    """Weight name -> shape of the whole model."""
    big_d, vocab = config["hidden_size"], config["vocab_size"]

    def mlp(name, width):
        return {f"{name}.gate_proj.weight": (width, big_d), f"{name}.up_proj.weight": (width, big_d),
                f"{name}.down_proj.weight": (big_d, width)}

    shapes = {"model.embed_tokens.weight": (vocab, big_d)}
    for layer in range(config["num_hidden_layers"]):
        if "kv_lora_rank" in config:
            block = oracle.mla_shapes(config, biases, True)
        else:
            block = oracle.gqa_shapes(config, biases)
        block["post_attention_layernorm.weight"] = (big_d,)
        if is_moe(config, layer):
            width = config["moe_intermediate_size"]
            block["mlp.gate.weight"] = (config["n_routed_experts"], big_d)
            block["mlp.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
            for e in range(config["n_routed_experts"]):
                block.update(mlp(f"mlp.experts.{e}", width))
            block.update(mlp("mlp.shared_experts", config["n_shared_experts"] * width))
        else:
            block.update(mlp("mlp", config["intermediate_size"]))
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in block.items()})
    shapes["model.norm.weight"] = (big_d,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, big_d)
    return shapes
