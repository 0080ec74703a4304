"""The signatures that people who switch to `tidegate.tensors` rely on, by module: names, order and defaults."""

_WRITTEN = {
    "bilinear": """
        euclidean_metric(d); scaled_euclidean_metric(d, scale=None); learned_metric(W); diagonal_metric(diag);
        lower_index(v_upper, g); raise_index(v_lower, g_inv); metric_inverse(g); bilinear_form(u, v, g);
        bilinear_form_batch(Q, K, g); quadratic_form(v, g); inner_product(u, v, metric_type='scaled');
        verify_metric_properties(g, tol=1e-06)
    """,
    "softmax": """
        softmax_rows(x); log_softmax(x); gibbs_distribution(energies, temperature=1.0, mask=None);
        partition_function(energies, temperature=1.0); free_energy(energies, temperature=1.0);
        entropy(probs, eps=1e-12); attention_entropy(A, eps=1e-12); max_entropy(n);
        normalized_entropy(A, eps=1e-12); temperature_sweep(energies, temperatures);
        effective_number_of_states(probs); softmax_jacobian(probs); softmax_jacobian_batched(probs)
    """,
    "masking": """
        causal_mask(n); causal_mask_with_window(n, window); padding_mask(lengths, max_len);
        attention_mask_from_padding(query_lengths, key_lengths, max_q, max_k);
        causal_padding_mask(lengths, max_len); local_attention_mask(n, window);
        strided_attention_mask(n, stride); block_sparse_mask(n, block_size);
        global_local_mask(n, window, global_tokens); apply_mask(scores, mask, fill_value=-1000000000.0);
        mask_to_additive(mask, fill_value=-1000000000.0); visualize_mask(mask)
    """,
    "attention": """
        attention_scores(Q, K, scale=True); attention_scores_with_metric(Q, K, g);
        attention_weights(S, mask=None, temperature=1.0); attention_output(A, V);
        scaled_dot_product_attention(Q, K, V, mask=None, temperature=1.0, return_weights=False);
        bilinear_attention(Q, K, V, g, mask=None, temperature=1.0, return_weights=False);
        batched_attention(Q, K, V, mask=None); decompose_attention(Q, K, V)
    """,
    "multihead": """
        multihead_attention(Q, K, V, W_Q, W_K, W_V, W_O, mask=None, return_weights=False);
        multihead_attention_batched(Q, K, V, W_Q, W_K, W_V, W_O, mask=None);
        init_multihead_weights(key, d_model, num_heads, d_k=None, d_v=None); head_diversity(A);
        head_attention_entropy(A); decompose_multihead(Q, K, V, W_Q, W_K, W_V, W_O)
    """,
    "gradients": """
        grad_scores_wrt_Q(dL_dS, K, scale); grad_scores_wrt_K(dL_dS, Q, scale); grad_softmax(dL_dA, A);
        grad_output_wrt_A(dL_dO, V); grad_output_wrt_V(dL_dO, A); attention_backward(dL_dO, Q, K, V, A, S);
        verify_gradients(Q, K, V, rtol=1e-05, atol=1e-05); gradient_numerical_check(Q, K, V, eps=1e-05);
        gradient_flow_analysis(Q, K, V)
    """,
    "hopfield": """
        classical_hopfield_energy(state, patterns); classical_hopfield_update(state, patterns);
        modern_hopfield_energy(state, patterns, beta=1.0); modern_hopfield_update(state, patterns, beta=1.0);
        hopfield_retrieve(query, patterns, beta=1.0, max_iterations=10, tol=1e-06);
        attention_as_hopfield(queries, keys, values, beta=None); classical_capacity(N);
        modern_capacity(d, epsilon=0.01); separation_quality(patterns);
        energy_landscape_1d(patterns, axis=0, n_points=100, beta=1.0);
        retrieval_basin(pattern_idx, patterns, n_samples=100, noise_scale=0.5, beta=1.0, key=None)
    """,
    "einsum": """
        dot_product(u, v); outer_product(u, v); matrix_transpose(A); trace(A); matrix_multiply(A, B);
        batch_matrix_multiply(A, B); frobenius_norm_squared(A); hadamard_product(A, B);
        bilinear_form_einsum(u, M, v); batch_bilinear_form(Q, g, K); attention_scores_einsum(Q, K, scale=True);
        attention_output_einsum(A, V); batched_attention_scores_einsum(Q, K);
        batched_attention_output_einsum(A, V); multihead_project_einsum(X, W);
        multihead_scores_einsum(Q_h, K_h); multihead_output_einsum(A, V_h); multihead_combine_einsum(O_h, W_O);
        batched_multihead_project_einsum(X, W); batched_multihead_scores_einsum(Q_h, K_h);
        parse_einsum(subscripts); explain_einsum(subscripts)
    """,
    "plots": """
        plot_attention_weights(A, query_labels=None, key_labels=None, title='Attention Weights', cmap='Blues',
            figsize=(8, 6), ax=None);
        plot_multihead_attention(A, head_names=None, figsize=None);
        plot_entropy_distribution(A, title='Attention Entropy Distribution', figsize=(8, 5));
        plot_temperature_sweep(scores, temperatures=None, figsize=(10, 4));
        plot_gradient_flow(flow_data, figsize=(12, 4)); plot_mask(mask, title='Attention Mask', figsize=(6, 6));
        plot_hopfield_energy(patterns, state_trajectory=None, figsize=(10, 4));
        compare_metrics(Q, K, metrics, figsize=None)
    """,
}
SURFACE = {module: tuple(" ".join(text.split()).split("; ")) for module, text in _WRITTEN.items()}
