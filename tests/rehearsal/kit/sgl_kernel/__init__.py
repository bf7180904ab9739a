"""A double of the CPU build of sgl_kernel, which PyPI does not have: plain torch, only what SGLang 0.5.23 calls."""

import ctypes

import torch
import torch.nn.functional as F


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    pairs = list(zip(tgt_loc.tolist(), src_loc.tolist()))
    for p, s in zip(data_ptrs.tolist(), strides.tolist()):
        rows = [ctypes.string_at(p + b * s, s) for _, b in pairs]
        for (t, _), r in zip(pairs, rows):
            ctypes.memmove(p + t * s, r, s)


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    o = 0
    for r, s, e in zip(req_pool_indices.tolist(), start.tolist(), end.tolist()):
        req_to_token[r, s:e] = out_cache_loc[o : o + e - s].to(req_to_token.dtype)
        o += e - s


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    o = 0
    for r, s, e in zip(req_pool_indices.tolist(), start.tolist(), end.tolist()):
        out_cache_loc[o : o + e - s] = req_to_token[r, s:e].to(out_cache_loc.dtype)
        o += e - s


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, steps
):
    n = topk * steps
    for i, (r, s) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        out_cache_loc[i * n : (i + 1) * n] = req_to_token[r, s : s + n].to(out_cache_loc.dtype)


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride):
    f = accept_tokens.reshape(-1)
    i = torch.arange(accept_lens.numel()) * stride + accept_lens.long() - 1
    bonus_tokens[: accept_lens.numel()] = f[i].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    ix = accept_index.reshape(-1)
    ix = ix[ix > -1].long()
    accept_out_cache_loc[: ix.numel()] = out_cache_loc[ix]


def rotate_input_ids_cpu(input_ids, start_loc, seq_lens, topk_index, select_index=None):
    t = topk_index.reshape(-1)
    for i, (s, n) in enumerate(zip(start_loc.tolist(), seq_lens.tolist())):
        if n <= 0:
            continue
        input_ids[s : s + n - 1] = input_ids[s + 1 : s + n].clone()
        input_ids[int(select_index[i]) if select_index is not None else s + n - 1] = t[i]


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    depth,
    n,
    mode,
):
    mode = int(mode)
    assert mode in (0, 1), mode
    ri, nt, ns = (x.view(-1, n) for x in (retrieve_index, retrieve_next_token, retrieve_next_sibling))
    pl, si = parent_list.tolist(), selected_index.tolist()
    prefix = 0
    for b, L in enumerate(seq_lens.tolist()):

        def find(tok):
            for p in range(n - 1):
                if si[b][p] == tok:
                    return p
            return -1

        base = n * n * b + (prefix * n if mode == 0 else 0)
        prefix += L
        positions[b * n] = L
        for i in range(n - 1, 0, -1):
            ri[b, i] = b * n + i
            ptb = si[b][i - 1] // topk
            pp = 0
            if ptb > 0:
                q = find(pl[b][ptb])
                if q < 0:
                    continue
                pp = q + 1
            old = int(nt[b, pp])
            nt[b, pp] = i
            if old != -1:
                ns[b, i] = old
        ri[b, 0] = b * n
        for d in range(n):
            row = base + ((L + n) * d + L if mode == 0 else n * d)
            tree_mask[row] = True
            tree_mask[row + 1 : row + n] = False
            if d == 0:
                continue
            cur, pos = d - 1, 0
            for _ in range(depth):
                pos += 1
                tree_mask[row + 1 + cur] = True
                ptb = si[b][cur] // topk
                if ptb == 0:
                    break
                cur = find(pl[b][ptb])
                if cur < 0:
                    break
            positions[b * n + d] = pos + L


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    tp = target_predict.reshape(-1)
    for b in range(candidates.shape[0]):
        last = int(retrive_index[b, 0])
        accept_index[b, 0] = last
        k, cur = 0, 0
        for _ in range(1, accept_index.shape[1]):
            cur = int(retrive_next_token[b, cur])
            want = int(tp[last])
            while cur != -1 and int(candidates[b, cur]) != want:
                cur = int(retrive_next_sibling[b, cur])
            if cur == -1:
                break
            predicts[last] = want
            k += 1
            last = int(retrive_index[b, cur])
            accept_index[b, k] = last
        accept_token_num[b] = k
        predicts[last] = int(tp[last])


# What the intel_amx attention backend and the "has AMX" branches call through torch.ops.sgl_kernel.


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    out = req_to_token[req_pool_indices.long()].repeat_interleave(topk, 0).clone()
    if topk > 1:
        for b, (r, L) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
            for j in range(topk):
                s = L + j * num_steps
                out[b * topk + j, L : L + num_steps] = req_to_token[r, s : s + num_steps]
    return out


def _attn(q, k, v, scale, mask, cap):
    # q [Tq,H,D]; k,v [Tk,Hk,D]; mask [Tq,Tk] bool
    g = q.shape[1] // k.shape[1]
    kf, vf = (x.float().repeat_interleave(g, 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.float(), kf) * scale
    if cap and cap > 0:
        s = cap * torch.tanh(s / cap)
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf"))
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), vf)


def extend_attention_cpu(
    q,
    k,
    v,
    o,
    kb,
    vb,
    ks,
    vs,
    req_to_token,
    req_pool,
    seq_lens,
    ext_lens,
    start,
    max_ext,
    scale,
    cap,
    is_cross,
    window,
    enc_lens,
    sinks,
    tree_mask,
    causal,
):
    off = 0
    for r, L, n, s in zip(req_pool.tolist(), seq_lens.tolist(), ext_lens.tolist(), start.tolist()):
        if n <= 0:
            continue
        loc = req_to_token[r, :L].long()
        P = L - n
        K, V = kb[loc], vb[loc]
        if k is not None:
            K[P:] = k[s : s + n].view(n, *K.shape[1:])
            V[P:] = v[s : s + n].view(n, *V.shape[1:])
        m = torch.ones(n, L, dtype=torch.bool)
        if tree_mask is not None:
            m[:, P:] = tree_mask.reshape(-1)[off : off + n * n].view(n, n).bool()
            off += n * n
        elif causal:
            m[:, P:] = torch.ones(n, n, dtype=torch.bool).tril()
        o[s : s + n] = _attn(q[s : s + n], K, V, scale, m, cap).to(o.dtype)


def decode_attention_cpu(
    q,
    kb,
    vb,
    ks,
    vs,
    o,
    k,
    v,
    loc,
    logits,
    req_to_token,
    req_pool,
    seq_lens,
    scale,
    cap,
    is_cross,
    window,
    enc_lens,
    sinks,
):
    if k is not None:
        kb[loc.long()] = k.view(-1, *kb.shape[1:]).to(kb.dtype)
        vb[loc.long()] = v.view(-1, *vb.shape[1:]).to(vb.dtype)
    for i, (r, L) in enumerate(zip(req_pool.tolist(), seq_lens.tolist())):
        loc_b = req_to_token[r, :L].long()
        o[i : i + 1] = _attn(q[i : i + 1], kb[loc_b], vb[loc_b], scale, None, cap).to(o.dtype)


def _rms(x, w, eps):
    f = x.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * w


def rmsnorm_cpu(x, w, eps):
    return _rms(x, w, eps)


def fused_add_rmsnorm_cpu(x, residual, w, eps):
    residual.add_(x)
    x.copy_(_rms(residual, w, eps))


def silu_and_mul_cpu(x):
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def convert_weight_packed(w):
    return w


def weight_packed_linear(x, w, bias, is_vnni):
    return F.linear(x, w, bias)


def rotary_embedding_cpu(positions, query, key, head_size, cache, neox):
    cos, sin = cache.index_select(0, positions.flatten()).float().unsqueeze(1).chunk(2, -1)
    out = []
    for x in (query, key):
        y = x.clone()
        t = y.view(positions.numel(), -1, head_size)
        rot = cache.shape[-1]
        r = t[..., :rot].float()
        if neox:
            a, b = r.chunk(2, -1)
            z = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        else:
            a, b = r[..., ::2], r[..., 1::2]
            z = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        t[..., :rot] = z.to(x.dtype)
        out.append(y)
    return tuple(out)


def store_cache_cpu(k, v, kc, vc, idx, row):
    kc[idx] = k.view(-1, *kc.shape[1:]).to(kc.dtype)
    vc[idx] = v.view(-1, *vc.shape[1:]).to(vc.dtype)


def init_cpu_threads_env(cpus):
    return ""


def initialize(size, rank):
    pass


_ns = torch.ops.sgl_kernel
for _n in (
    "extend_attention_cpu",
    "decode_attention_cpu",
    "rmsnorm_cpu",
    "fused_add_rmsnorm_cpu",
    "silu_and_mul_cpu",
    "convert_weight_packed",
    "weight_packed_linear",
    "rotary_embedding_cpu",
    "store_cache_cpu",
    "init_cpu_threads_env",
    "initialize",
):
    setattr(_ns, _n, globals()[_n])


def _missing(n):
    def f(*a, **k):
        raise NotImplementedError(f"sgl_kernel stand-in has no {n}")

    return f


for _n in (
    "apply_rotary_pos_emb_cpu",
    "fused_sigmoid_mul_cpu",
    "conv3d_embed_cpu",
    "flash_attn_varlen_func",
    "fused_moe_router_cpu",
    "fused_dual_residual_rmsnorm_cpu",
    "causal_conv1d_fwd_cpu",
    "causal_conv1d_update_cpu",
    "chunk_gated_delta_rule_cpu",
    "fused_gdn_gating_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_qkvzba_split_reshape_cat_cpu",
    "multimodal_rotary_embedding_cpu",
    "fused_rmsnorm_gated_cpu",
):
    setattr(_ns, _n, _missing(_n))
