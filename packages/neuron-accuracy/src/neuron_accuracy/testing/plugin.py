# SPDX-License-Identifier: Apache-2.0
"""What pytest loads: ``assert_module_close`` as a fixture, and its marker."""
