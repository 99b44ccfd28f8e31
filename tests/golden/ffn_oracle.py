"""Float64 oracle of a decoder layer's second half, and of last norm, head and cross-entropy, forward and backward, in
plain NumPy; make_golden.py writes files with it.

y = x + FFN(RMSNorm(x)) with SwiGLU or a mixture of experts (routers of DeepSeek-V2 and V3). x [T, D]; E experts, k a
token. A mixture is computed densely, every expert on every token, and masked by the weights.
"""

import numpy as np


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def norm_forward(x, gain, eps):
    scale = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return x * scale * gain, scale


def norm_backward(x, gain, scale, dy):
    unit, g = x * scale, dy * gain
    return scale * (g - unit * (g * unit).mean(axis=-1, keepdims=True)), (dy * unit).sum(axis=0)


def mlp_forward(w, prefix, u):
    gate, up = u @ w[prefix + "gate_proj.weight"].T, u @ w[prefix + "up_proj.weight"].T
    return (gate * sigmoid(gate) * up) @ w[prefix + "down_proj.weight"].T


def mlp_backward(w, prefix, u, dy, grads):
    """Gradient of u; enters those of the weights."""
    gate, up = u @ w[prefix + "gate_proj.weight"].T, u @ w[prefix + "up_proj.weight"].T
    s = sigmoid(gate)
    grads[prefix + "down_proj.weight"] = dy.T @ (gate * s * up)
    da = dy @ w[prefix + "down_proj.weight"]
    dgate, dup = da * up * s * (1 + gate * (1 - s)), da * gate * s
    grads[prefix + "gate_proj.weight"], grads[prefix + "up_proj.weight"] = dgate.T @ u, dup.T @ u
    return dgate @ w[prefix + "gate_proj.weight"] + dup @ w[prefix + "up_proj.weight"]


def is_v3(config):
    return config["topk_method"] == "noaux_tc"


def scores_of(config, logits):
    if is_v3(config):
        return sigmoid(logits)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def choose(config, scores, bias):
    """Experts [T, k], best first."""
    choice = scores + bias if is_v3(config) else scores.copy()
    tokens, experts = choice.shape
    groups = config.get("n_group", 1)
    if config["topk_method"] != "greedy" and groups > 1:
        members = np.sort(choice.reshape(tokens, groups, -1), axis=-1)
        best = members[..., -2:].sum(axis=-1) if is_v3(config) else members[..., -1]
        kept = np.argsort(-best, axis=-1, kind="stable")[:, : config["topk_group"]]
        mask = np.zeros((tokens, groups), dtype=bool)
        np.put_along_axis(mask, kept, True, axis=-1)
        choice = np.where(np.repeat(mask, experts // groups, axis=-1), choice, -np.inf)
    return np.argsort(-choice, axis=-1, kind="stable")[:, : config["num_experts_per_tok"]]


def renormalises(config):
    return config["norm_topk_prob"] and (is_v3(config) or config["num_experts_per_tok"] > 1)


def scaling(config):
    return 1.0 if renormalises(config) and not is_v3(config) else config["routed_scaling_factor"]


def ffn_forward(config, w, x):
    """y and the tape."""
    u, scale = norm_forward(x, w["post_attention_layernorm.weight"], config["rms_norm_eps"])
    tape = {"x": x, "u": u, "scale": scale}
    if not config.get("n_routed_experts"):
        return x + mlp_forward(w, "mlp.", u), tape
    scores = scores_of(config, u @ w["mlp.gate.weight"].T)
    experts = choose(config, scores, w.get("mlp.gate.e_score_correction_bias", 0.0))
    chosen = np.zeros_like(scores)
    np.put_along_axis(chosen, experts, 1.0, axis=-1)
    total = (scores * chosen).sum(axis=-1, keepdims=True) + 1e-20 if renormalises(config) else 1.0
    weights = scaling(config) * scores * chosen / total
    out = np.stack([mlp_forward(w, f"mlp.experts.{e}.", u) for e in range(scores.shape[1])], axis=1)  # [T, E, D]
    y = x + np.einsum("te,ted->td", weights, out)
    if config.get("n_shared_experts"):
        y = y + mlp_forward(w, "mlp.shared_experts.", u)
    tape.update(scores=scores, experts=experts, chosen=chosen, total=total, weights=weights, out=out)
    return y, tape


def ffn_backward(config, w, tape, dy):
    """dx and the gradients by name."""
    grads, u = {}, tape["u"]
    if not config.get("n_routed_experts"):
        du = mlp_backward(w, "mlp.", u, dy, grads)
    else:
        scores, chosen, total, weights = tape["scores"], tape["chosen"], tape["total"], tape["weights"]
        du = np.zeros_like(u)
        for e in range(scores.shape[1]):
            du += mlp_backward(w, f"mlp.experts.{e}.", u, dy * weights[:, e : e + 1], grads)
        dweights = np.einsum("td,ted->te", dy, tape["out"]) * chosen
        dscores = scaling(config) * dweights / total
        if renormalises(config):
            dscores -= scaling(config) * chosen * (dweights * scores).sum(axis=-1, keepdims=True) / total**2
        if is_v3(config):
            dlogits = dscores * scores * (1 - scores)
        else:
            dlogits = scores * (dscores - (dscores * scores).sum(axis=-1, keepdims=True))
        grads["mlp.gate.weight"] = dlogits.T @ u
        du += dlogits @ w["mlp.gate.weight"]
        if config.get("n_shared_experts"):
            du += mlp_backward(w, "mlp.shared_experts.", u, dy, grads)
    dx, grads["post_attention_layernorm.weight"] = norm_backward(
        tape["x"], w["post_attention_layernorm.weight"], tape["scale"], du)
    return dx + dy, grads


def ffn_shapes(config):
    """Shapes of the weights under their names below model.layers.L."""
    hidden = config["hidden_size"]
    shapes = {"post_attention_layernorm.weight": (hidden,)}

    def mlp(prefix, width):
        shapes[prefix + "gate_proj.weight"] = shapes[prefix + "up_proj.weight"] = (width, hidden)
        shapes[prefix + "down_proj.weight"] = (hidden, width)

    experts = config.get("n_routed_experts")
    if not experts:
        mlp("mlp.", config["intermediate_size"])
        return shapes
    shapes["mlp.gate.weight"] = (experts, hidden)
    if is_v3(config):
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    for e in range(experts):
        mlp(f"mlp.experts.{e}.", config["moe_intermediate_size"])
    if config.get("n_shared_experts"):
        mlp("mlp.shared_experts.", config["n_shared_experts"] * config["moe_intermediate_size"])
    return shapes


def head_forward(config, w, x, targets):
    """Loss sum over targets >= 0, and the tape. Logits are divided by hidden_size/dim_model_base where there is one."""
    u, scale = norm_forward(x, w["norm.weight"], config["rms_norm_eps"])
    base = config.get("dim_model_base", 0)
    divisor = config["hidden_size"] / base if base else 1.0
    logits = u @ w["lm_head.weight"].T / divisor
    top = logits.max(axis=-1, keepdims=True)
    p = np.exp(logits - top)
    lse = np.log(p.sum(axis=-1)) + top[:, 0]
    scored = targets >= 0
    losses = np.where(scored, lse - np.take_along_axis(logits, np.maximum(targets, 0)[:, None], axis=-1)[:, 0], 0.0)
    p = p / p.sum(axis=-1, keepdims=True)
    return losses.sum(), {"x": x, "u": u, "scale": scale, "p": p, "losses": losses, "divisor": divisor, "logits": logits}


def head_backward(w, tape, targets):
    """dx and gradients of the loss sum."""
    dlogits = tape["p"].copy()
    dlogits[np.arange(len(targets)), np.maximum(targets, 0)] -= 1
    dlogits = dlogits * (targets >= 0)[:, None] / tape["divisor"]
    dx, dnorm = norm_backward(tape["x"], w["norm.weight"], tape["scale"], dlogits @ w["lm_head.weight"])
    return dx, {"norm.weight": dnorm, "lm_head.weight": dlogits.T @ tape["u"]}
